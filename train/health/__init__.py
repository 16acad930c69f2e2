"""The signs of a rank's health that other processes read, and the request to stop a run."""
