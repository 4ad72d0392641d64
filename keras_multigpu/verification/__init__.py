"""`verify`: does a model train on N replicas as on one device, and if not, why?

The modules, from the call to the result:

    verify              the function; where the comparison runs
    in_this_process     devices and strategies
    other_process       a fresh process, where TensorFlow has started already
    batches             the first global batches of the user's data
    participants        one model on one device or on N replicas, trained step by step; random
                        layers are switched off, because replicas draw differently by design
    comparison          all participants in lockstep; what differs, and since when
    causes              the likely cause, from what the two probes find:
    layer_probe         layers whose output for an example depends on other examples
    gradient_probe      gradients of shares that do not add up to those of the whole batch
    report, verification    the result
"""
