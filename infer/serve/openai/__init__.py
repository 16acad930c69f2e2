"""HTTP in OpenAI's dialect, on the same event loop, engine and admission as gRPC."""
