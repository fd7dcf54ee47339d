"""What `launch/report.py` reads, compares, draws and writes."""
