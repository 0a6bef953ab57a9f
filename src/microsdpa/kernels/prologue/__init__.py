"""Norms and rotary embedding of Q and K in a launch ahead of attention."""
