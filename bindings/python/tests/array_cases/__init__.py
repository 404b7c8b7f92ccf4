"""Cases of the array API, drawn by a seed, and their comparison with another implementation."""
