"""Libraries that microsdpa registers itself with, on demand."""
