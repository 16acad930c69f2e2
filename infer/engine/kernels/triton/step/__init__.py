"""What a step sends to the device, and what comes back."""
