// The process that holds a pod's namespaces on the tests' node: nothing here ships.
module fairlead.test/pause

go 1.26.0
