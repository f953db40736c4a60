"""Data sets as their owners distribute them: opened as a stream, read into samples, compared with what is published."""
