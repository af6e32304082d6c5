"""Generators: token ids in, token ids and their log-probs out. `torch_sampler` samples in this process, `vllm` with an
engine beside it."""
