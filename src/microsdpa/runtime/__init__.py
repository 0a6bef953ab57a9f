"""The host side of a launch: modules, plans and the one foreign call of the hot path."""
