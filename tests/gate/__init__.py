"""The gate: leaks planted in the embedded engine's server must be found through HTTP alone, clean servers pass."""
