"""A Ray cluster joined or started, one function on N of its workers, and the choice between Ray and processes."""
