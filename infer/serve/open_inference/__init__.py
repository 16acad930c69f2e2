"""The Open Inference Protocol, version 2: the same model under the names and tensors that other model servers have."""
