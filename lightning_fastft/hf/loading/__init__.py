"""Load a model: from a name, a folder or a configuration to weights on a device.

``source`` names the model, ``safe_files`` checks files before a library acts on them, ``model`` reads the weights,
``initialisation`` draws them, ``finite_weights`` checks them. Read ``model`` first.
"""
