"""The worker process: its client, its server, and what operating systems have in different forms."""
