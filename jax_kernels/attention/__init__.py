"""Softmax attention, and what prepares its queries and keys."""
