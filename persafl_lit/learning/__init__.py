"""What a client computes: objectives, local steps, fine-tuning, metrics."""
