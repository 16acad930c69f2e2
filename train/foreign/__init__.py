"""`initialize`: any torch.nn.Module, trained with ZeRO and saved in our checkpoints."""
