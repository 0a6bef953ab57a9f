"""Evidence: correctness against the oracle, timings by one protocol, and the files and tables that record them."""
