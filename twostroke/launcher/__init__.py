"""`twostroke up`: every service as a child process, checked before it starts and kept alive until told to stop."""
