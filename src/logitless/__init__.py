"""Logitless: train a small GPT without ever holding its logits."""
