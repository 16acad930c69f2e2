"""The backend on torch's operators, which runs everywhere."""
