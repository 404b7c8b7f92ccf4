"""What all tests share."""

import signal

# A process that starts in the background may ignore Ctrl-C, and Python then has no handler of it. Children
# inherit that too.
signal.signal(signal.SIGINT, signal.default_int_handler)
