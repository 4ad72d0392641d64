"""`keras-multigpu rehearse`: a user's script in a minute, and what would fail later.

The modules, from the command to a step:

    rehearse        the parent: starts the script, starts it again once it has killed itself
    script          the child: runs the script with all that follows in place
    overlay         lets it write into a folder that lies over the user's files
    guard           refuses what it writes elsewhere
    shortened_fit   two steps instead of a training
    trials          what is tried at the end of each `fit`
    findings        what was found, in a file for the parent
"""
