"""Workloads: clients that do what applications do, and note the answers of the cluster.

    appends   idempotent producers with unique values, readers that follow, a lookout
    streams   a group whose members come and go, read, and store positions
    growing   a queue whose records become larger when it has dead letters
    queues    workers that lease and settle records in all ways, or die; poison records
    delays    delayed records in all lanes; some expire and some are cancelled
    changes   topics are created, deleted and grown, and copies moved, under load

A new workload is one more module here. Its operations are new classes in history.py, and its
promise is a new checker.
"""
