"""The prediction of a step's memory and time: workload, hardware, fitted constants."""
