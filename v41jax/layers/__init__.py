"""Pure layer functions `(weights, inputs, ...) -> outputs`, one file a concept."""
