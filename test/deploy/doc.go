// Package deploy tests deploy/: charts and components are rendered by the libraries of Helm and kustomize in every mode and
// decoded into the types of the Kubernetes API, units, compose file, Dockerfile and alert rules are checked by their own
// tools. It is a module of its own, so that nobody who uses grapevine downloads Kubernetes.
package deploy
