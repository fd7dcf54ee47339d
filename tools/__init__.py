"""Instruments of the developers: they may import everything, and nothing imports them."""
