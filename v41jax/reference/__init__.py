"""A float64 NumPy model of one sequence, written from the model specification alone."""
