"""Figures and tables of what clients hold and what runs reached."""
