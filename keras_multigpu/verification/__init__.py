"""`verify`: does a model train on N replicas as on one device?

The modules, from the call to the result:

    verify              the function
    in_this_process     devices and strategies
    batches             the first global batches of the user's data
    participants        one model on one device or on N replicas, trained step by step, with the
                        same weights and seeds
    comparison          all participants in lockstep; what differs, and from which step on
    verification        the result
"""
