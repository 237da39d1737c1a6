"""Time, memory and limits of functions, measured fairly."""
