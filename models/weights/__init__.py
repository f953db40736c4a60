"""Read and write weight files, in our format and in those of other projects."""
