"""One folder per operation: plain reference, Triton kernel, public function."""
