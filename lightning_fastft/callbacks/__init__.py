"""Callbacks for Trainer(callbacks=[...])."""
