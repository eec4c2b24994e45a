"""What a run did, as data and as one HTML page: host waits by line, copies of a profiled step, curves of bounded size, pictures."""
