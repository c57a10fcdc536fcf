-- KEYS: sessions. Their ids; false: it is not there.
local ids = {}
for at, name in ipairs(KEYS) do
    ids[at] = redis.call('HGET', name, 'id')
end
return ids
