"""The order in which experts see their routed slots."""
