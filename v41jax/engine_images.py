"""Images of an engine's requests: from files to expanded prompts, and from leases to the embedding rows of a step.

The vision tower's weights live here. `prepare` may run on any thread; everything else belongs to the thread that steps
the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.scheduled_batch import ScheduledBatch
from scheduler.sequence import ImageSpan, RequestId
from v41jax.config import ModelConfig
from v41jax.image_encoder import encode_images
from v41jax.image_leases import ImageChunk, ImageLeases
from v41jax.image_planning import ImageError, image_token_count
from v41jax.image_processing import DEFAULT_LIMITS, ImageLimits, ProcessedImage, image_size, process_image
from v41jax.image_spans import ImagePrompt, expand_placeholders, span_embeddings
from v41jax.layers.vision import VisionParameters
from v41jax.precision import Precision


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt.

    Attributes:
      prompt: the prompt with its placeholders expanded.
      images: one a span, in order.
    """

    prompt: ImagePrompt
    images: tuple[ProcessedImage, ...]

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        """The spans as a scheduler's request holds them."""
        return tuple(ImageSpan(span.start, span.length, span.digest) for span in self.prompt.spans)


class EngineImages:
    """What an engine that accepts images holds for them.

    Attributes:
      leases: embedding rows of live requests.
      encoded: images that went through the vision tower.
    """

    def __init__(self, parameters: VisionParameters, config: ModelConfig, precision: Precision, capacity_bytes: int):
        """Nothing is encoded or compiled yet.

        Args:
          parameters: weights, on the device.
          config: of the checkpoint.
          precision: of the activations.
          capacity_bytes: host memory of patches and rows; images that nobody uses may stay within it.
        """
        self.encoded = 0
        self._parameters = parameters
        self._delimiters = np.asarray(parameters.delimiters)
        self._config = config
        self._precision = precision
        self.leases = ImageLeases(
            self._encode,
            row_bytes=config.text.hidden_size * np.dtype(precision.activation_dtype).itemsize,
            capacity_bytes=capacity_bytes,
            idle_bytes=capacity_bytes,
        )

    def prepare(
        self,
        token_ids: Sequence[int],
        images: Sequence[bytes | ProcessedImage],
        max_tokens: int,
        limits: ImageLimits = DEFAULT_LIMITS,
    ) -> PromptImages:
        """Decodes and processes images and expands their placeholders.

        Args:
          token_ids: one placeholder id an image.
          images: files, or processed images, in the order of the placeholders.
          max_tokens: of the expanded prompt; checked from the files' headers, before a pixel is decoded.
          limits: cost of one file.

        Raises:
          ImageError: with every unusable image by its number, or a prompt that does not fit its images or the limit.
        """
        vision = self._config.vision
        placeholders = sum(token == self._config.image_token_id for token in token_ids)
        if placeholders != len(images):
            raise ImageError(f"the prompt has {placeholders} image placeholders and {len(images)} images")
        counts = _each(images, lambda image: _token_count(image, self._config, limits))
        total = len(token_ids) - len(images) + sum(counts)
        if total > max_tokens:
            raise ImageError(
                f"the prompt has {total} tokens, {sum(counts)} of them for images; at most {max_tokens} are accepted"
            )
        processed = _each(
            images,
            lambda image: image if isinstance(image, ProcessedImage) else process_image(image, vision, limits),
        )
        return PromptImages(
            expand_placeholders(np.asarray(token_ids, np.int32), processed, self._config.image_token_id),
            tuple(processed),
        )

    def step_rows(
        self, batch: ScheduledBatch, rows: int, first_rows: NDArray[np.int64]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Embedding rows of a step, recomputed rows included; encodes images that are read for the first time.

        Args:
          batch: the step.
          rows: N, rows of the step's bucket, of all data shards.
          first_rows: [b] where the first row of each request lies among them.

        Returns:
          rows [I, D] activation dtype and destinations [I] int32, padding N; None for a step of text.

        Raises:
          RuntimeError: a request without the lease its images need.
        """
        if not batch.image_rows.any():
            return None
        columns = zip(batch.request_ids, batch.starts.tolist(), batch.ends.tolist(), first_rows.tolist(), strict=True)
        found = self.leases.batch_rows([ImageChunk(*column) for column in columns], rows)
        held, wanted = 0 if found is None else int((found[1] < rows).sum()), int(batch.image_rows.sum())
        if held != wanted:
            raise RuntimeError(
                f"step {batch.index} has {wanted} image rows, its requests hold leases on {held} of them"
            )
        return found

    def release(self, request_id: RequestId) -> None:
        """Ends a request's lease; see `ImageLeases.release`."""
        self.leases.release(request_id)

    def statistics(self) -> dict[str, int]:
        """Images encoded, leases and bytes held."""
        return {
            "vision_encoded": self.encoded,
            "vision_requests": len(self.leases.requests),
            "vision_bytes_in_use": self.leases.held_bytes,
            "vision_bytes_idle": self.leases.idle_bytes,
        }

    def _encode(self, images: Sequence[ProcessedImage]) -> list[np.ndarray]:
        encoded = encode_images(self._parameters, images, self._config.vision, self._precision)
        self.encoded += len(images)
        return [span_embeddings(rows, self._delimiters, image.grid) for rows, image in zip(encoded, images)]


def _token_count(image: bytes | ProcessedImage, config: ModelConfig, limits: ImageLimits) -> int:
    if isinstance(image, ProcessedImage):
        return image.grid.tokens
    return image_token_count(*image_size(image, limits), config.vision)


def _each(images: Sequence[Any], function: Any) -> list[Any]:
    """The function's value for every image; its `ImageError`s together, by the image's number."""
    values, faults = [], []
    for number, image in enumerate(images):
        try:
            values.append(function(image))
        except ImageError as error:
            faults.append(f"image {number}: {error}")
    if faults:
        raise ImageError("; ".join(faults))
    return values
