"""Workloads: clients that do what applications do, and note what they are told.

    appends   idempotent producers with values of their own, readers that follow, a lookout
    streams   a group whose members come and go, read, and store positions
    growing   a queue whose records become larger when it has dead letters
    queues    workers that lease, settle well and badly, and give up; poison
    delays    records for later, with ends and in lanes, some cancelled
    changes   topics made, deleted and grown, copies moved, under load

A workload of transactions would be one more module here: its operations are new kinds in
history.py, its promise is a checker beside the others.
"""
