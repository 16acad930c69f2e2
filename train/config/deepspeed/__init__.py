"""DeepSpeed JSON configurations, mapped to the keys of tk's configuration."""
