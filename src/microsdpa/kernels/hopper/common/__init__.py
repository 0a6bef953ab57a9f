"""What several of Hopper's kernels share."""
