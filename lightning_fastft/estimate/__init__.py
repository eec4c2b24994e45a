"""Run the layers of a model on the meta device: ``fastft plan`` estimates steps on GPUs of other machines.

``model_costs`` takes a configuration and a GPU and returns a ``StepCost`` for the planner. ``machines`` lists published
rates, ``meta_model`` builds a model on the meta device, ``metering`` counts its work, and ``optimizer_cost`` that of
the optimizer. ``graph_plan`` decides whether layers run from CUDA graphs, and ``layouts`` distributes a step over many
GPUs. ``rehearsal`` finds the Triton kernels of a step, and ``FusedKernels`` compiles them while the model is read. Read
``costs`` first.
"""
