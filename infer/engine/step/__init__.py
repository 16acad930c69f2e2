"""Steps as arrays and bytes: their plan, and the message to the workers that changes one plan into the next."""
