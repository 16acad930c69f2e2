"""DeepSpeed JSON configurations as settings of ours."""
