"""A worker of a tf.data service in a process of its own, until its standard input ends.

service_worker.py HOST:PORT
"""

import sys

import tensorflow as tf

service = tf.data.experimental.service


def main(dispatcher):
    """Serve, and say so."""
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    del worker


if __name__ == "__main__":
    main(sys.argv[1])
