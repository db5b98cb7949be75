"""What a person sees of a running job: where time goes, who is slow and why, the run's folder, page and trace."""
