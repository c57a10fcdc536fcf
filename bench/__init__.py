"""Measurements, side by side in one run. Read the ratios: machines are noisy."""
