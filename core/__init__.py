"""What every room shares: errors, geometry, layout, dtypes and config. Never imports torch."""
