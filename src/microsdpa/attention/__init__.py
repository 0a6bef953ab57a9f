"""What users call: sdpa, plan, explain and quantize."""
