"""Read and write weight files in our format and in the formats of other projects."""
