"""The only folder that knows transformers, peft and bitsandbytes."""
