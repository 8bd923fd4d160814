"""Operations with several implementations: plain XLA (the definition), Mosaic for TPU, Triton for GPUs."""
